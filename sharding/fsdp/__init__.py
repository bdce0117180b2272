"""`fully_shard`: gathers the parameters of a layer before it runs, and reduces their gradients.

`states` has the hooks of modules, which decide when. `groups` does it for a group of parameters,
`gathering` has the recorded ops. `torch_private` has torch's private names.
"""
