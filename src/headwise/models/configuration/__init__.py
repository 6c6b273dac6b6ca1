"""What the keys of a configuration of transformers mean; nothing else in headwise reads them.

keys   sizes that all families have     families  every size of a model, by its model type
heads  the numbers of heads, kept up to date when they change
"""
