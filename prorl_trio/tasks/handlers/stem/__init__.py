"""Science questions: an agent that searches and computes, and graders for many kinds of short answers."""
