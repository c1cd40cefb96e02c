"""Programs that run in a verifier's sandbox, with the image's own Python and its standard library alone.

That is 3.8 or later, for Django's 3.5. They are uploaded for each grading, and import nothing but each other.
"""
