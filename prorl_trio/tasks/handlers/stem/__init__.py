"""Science questions: an agent that searches and computes, and graders that read short answers of many kinds."""
