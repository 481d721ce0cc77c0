"""How a job comes back: the containers that Kubernetes would start again, on this machine."""
