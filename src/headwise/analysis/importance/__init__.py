"""Which heads matter to a loss, by several methods, and whether the methods agree.

    import headwise as hw
    def loss_fn(model, batch):                                    # one number, the mean loss of the batch
        return model(**batch).loss

    by_gradient = hw.analysis.gradient_importance(model, batches, loss_fn)  # one backward pass a batch
    by_ablation = hw.analysis.ablation_importance(model, batches, loss_fn)  # one forward pass a batch and head
    gates = hw.analysis.learn_gates(model, batches, loss_fn, penalty=0.01)  # which heads are worth this price
    print(hw.analysis.rank_agreement([by_gradient, by_ablation, gates.importance]))
    print(hw.analysis.pruning_curve(model, others, loss_fn, by_gradient))  # on other batches than the order

Works on every model that `find_heads` supports; the model is unchanged afterwards.
"""
