"""What the keys of a configuration of transformers mean; nothing else in headwise reads them.

config   sizes that all families have, the window of each layer, what is known of one model type
kinds    the model types, a row each
sizes    every size of a model, by its model type; numbers of heads, kept up to date when they change
"""
