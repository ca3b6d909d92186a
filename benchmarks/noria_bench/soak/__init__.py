"""A long run under mixed traffic, attacks and kills, and whether memory, files, threads and connections stay flat."""
