"""The images that a request brings: start images with masks, images of ControlNets, references."""
