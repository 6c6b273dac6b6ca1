"""What the keys of a configuration of transformers mean; nothing else in headwise reads them.

keys      sizes that all families have                  families  every size of a model, by its model type
windows   the window of each layer                      family    what is known of one model type
decoders, experts, hybrids, sharing, encoders, encoder_decoders  the model types, by their kind
heads     the numbers of heads, kept up to date when they change
"""
