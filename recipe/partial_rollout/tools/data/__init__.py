"""``tools data``: the recipes' data sets as parquet files in verl's schema."""
