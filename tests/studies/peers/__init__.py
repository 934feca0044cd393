"""Compare the recipe with verl's own trainers: speed and staleness of equal training, as ratios within a seed."""
