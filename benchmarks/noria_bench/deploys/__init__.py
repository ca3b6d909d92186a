"""What users notice while versions of models change."""
