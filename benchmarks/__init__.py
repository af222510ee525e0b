"""What is measured, beside what users run in scripts/."""
