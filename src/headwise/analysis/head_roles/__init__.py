"""The roles of heads on an input: attention to the previous token, to the first one, along dependency arcs, and so on.

>>> import torch, headwise as hw
>>> q, k, v = torch.randn(3, 1, 4, 100, 16)
>>> _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
>>> found = hw.analysis.roles(amap, tokens=torch.randint(0, 20, (100,)))
>>> found["previous"].mass.shape, found["previous"].lift.shape          # [layers, heads]
((1, 4), (1, 4))
>>> found.labels(0, 3)                                                 # a random head has no role
[]
"""
