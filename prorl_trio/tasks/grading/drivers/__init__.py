"""Programs that run in a verifier's sandbox, using only the image's Python and its standard library.

They support Python 3.8 or later, and 3.5 for Django. They are uploaded for each grading, and import nothing but each
other.
"""
