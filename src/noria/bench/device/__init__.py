"""`noria bench device`: what a device makes of true-size UNets, and what the wheel makes of the device; torch and diffusers suffice."""
