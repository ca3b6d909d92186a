"""One module for each HTTP interface: reads requests, calls services, writes responses."""
