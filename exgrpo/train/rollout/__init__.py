"""Questions to graded answers: rollout engines behind one small interface, and what replies within an answer."""
