"""What every room may use: files, validated reading, and what long calls share."""
