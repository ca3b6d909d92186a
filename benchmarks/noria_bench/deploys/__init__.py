"""The effects that users notice while versions of models change."""
