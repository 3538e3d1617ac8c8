"""What a converted model is trained for: data, head, collator, metric and decoding of each task."""
