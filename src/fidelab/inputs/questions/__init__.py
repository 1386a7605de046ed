"""Short questions with exact graders, in ten kinds."""
