"""The INIT, RUN and EVAL stages and the jobs that move through them."""
