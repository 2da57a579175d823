"""What is in force: the region with its settings, rows, seeds, mode and module hooks."""
