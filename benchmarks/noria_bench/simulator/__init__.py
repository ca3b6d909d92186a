"""`noria simulate`: a cluster in virtual time, with the scheduler, the router and the autoscaler of the server."""
