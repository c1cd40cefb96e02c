"""Programs that run in a verifier's sandbox, with the image's own Python (3.8 or later) and its standard library alone.

They are uploaded for each grading, and import nothing but each other.
"""
