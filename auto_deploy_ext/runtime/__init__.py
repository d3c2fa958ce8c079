"""What runs in a step: mirrors are brought up to date, mutations repeated on the host or fused, and reads watched."""
