"""Facts, titles, notes and errors of reports and of the viewer, and what pictures say, in English and Chinese.

>>> message("fact_loss", loss=1.5).zh
'每词元 1.50 奈特'
>>> from headwise.wording import speaking
>>> with speaking("zh"):
...     said(message("fact_loss", loss=1.5))
'每词元 1.50 奈特'
"""

from headwise.wording import Message, in_language, language, tr

MESSAGES = {
    # Facts and titles of a report.
    "text": tr("text"),
    "model": tr("model"),
    "kernel": tr("kernel"),
    "corpus": tr("corpus"),
    "fact_corpus": tr("{tokens} in {windows}"),
    "steps": tr("steps"),
    "loss": tr("loss"),
    "fact_model": tr("{name}, {size} weights"),
    "fact_steps": tr("{count:,} measured; the last of them is shown"),
    "heldout": tr("held-out loss"),
    "fact_heldout": tr(
        "{least:.2f} to {most:.2f} nats per token, on held-out text of the same kind as the training text"
    ),
    "windows": tr("windows"),
    "fact_windows": tr(
        "the text is longer than the {size:,} tokens that the model is read with: windows of that length that overlap "
        "by half; a token attends to at least the {half:,} tokens before it"
    ),
    "windows_sampled": tr(
        "Patterns, roles and the comparison of heads are of {count} evenly spaced windows; statistics and maps are of "
        "the whole text. A map has no weights beyond a window."
    ),
    "caution": tr("caution"),
    "found_sink": tr(
        "{token}, the first token, is a sink of {count} of {heads} heads: {best} of the weight; equal weights would "
        "give {uniform:.2f} ({rows} queries)."
    ),
    "found_role": tr(
        "“{role}” ({what}) is the label of {count} of {heads} heads: {best}; equal weights would give {uniform:.2f} "
        "({rows} queries)."
    ),
    "found_none": tr(
        "No head has a label: a label needs {least} queries or more, a score above its threshold, and a confidence of "
        "95 %. This text has {tokens} tokens."
    ),
    "found_loss": tr(
        "{head} matters most: without it the loss on this text rises by {most:.2f} nats per token, without the median "
        "head by {median:.3f}. {little} of {heads} heads cost less than {least}."
    ),
    "found_pair": tr(
        "In {head}, {query} gives {key} {weight:.2f} of its weight; {count} other queries give it {mean:.2f}, and "
        "other keys at that distance get {far:.2f}: the largest difference."
    ),
    "found_keys": tr(
        "{head} is the sharpest head: a query divides its weight among {least:.1f} keys on average (e^entropy), that "
        "of the median head among {median:.1f}."
    ),
    "all_heads": tr("--all prints all {heads} heads and all remarks."),
    "columns": tr(
        "L2H4: layer 2, head 4. Pattern: mean weight over the queries; equal: that of equal weights. Weights show "
        "where a head attends, not why."
    ),
    "columns_loss": tr(
        "L2H4: layer 2, head 4. equal: the score of equal weights. loss: its rise without the head, in nats. Weights "
        "show where a head attends, not why."
    ),
    "unknown_text": tr(
        "{loss:.2f} nats per token, as a choice among {choices:,.0f} tokens; text like that of the training has at "
        "most {most:.2f} ({usual:,.0f} tokens). Heads may act differently here."
    ),
    "fact_loss": tr("{loss:.2f} nats per token"),
    "title_cross": tr("cross attention, {queries} at {keys}"),
    "title_decoder": tr("decoder, {tokens}"),
    "title_encoder": tr("encoder, {tokens}"),
    "title_entry": tr("entry {entry}"),
    # Comparisons and importance.
    "by_cka": tr("outputs (CKA)"),
    "about_cka": tr(
        "Linear CKA of the heads' outputs: 1 if they differ by a rotation, a scale and a shift only; few tokens "
        "increase it."
    ),
    "by_cosine": tr("outputs (cosine)"),
    "about_cosine": tr(
        "Cosine of the heads' outputs, each in its own basis: near 0 does not mean that they carry different things."
    ),
    "by_maps": tr("attention maps"),
    "about_maps": tr(
        "Jensen–Shannon divergence between the rows of their maps, mean over queries: 0 for equal attention."
    ),
    "about_ablation": tr("Loss without the head, minus the loss with all heads."),
    "about_gradient": tr("Gradient of the loss with respect to a mask of the head (Michel et al. 2019)."),
    "on_windows": tr("{about} On {windows} windows of {tokens} tokens."),
    # Notes.
    "explained": tr(
        "Weights show which tokens a head attends to on this text; they do not explain the output of the model."
    ),
    "beside": tr("Statistics, patterns, roles and comparisons are those of the first text."),
    "not_compared": tr("The {heads:,} heads are not compared: a picture holds at most {most}."),
    "maps_only": tr("The outputs of each head are not known for this model: heads are compared by their maps only."),
    "maps_only_finite": tr("Outputs of heads are NaN or infinite: heads are compared by their maps only."),
    "not_compared_finite": tr("Outputs of heads are NaN or infinite: heads are not compared."),
    "gradient_only": tr(
        "Ablating each of the {heads} heads would take {work:.0e} operations, so importance is estimated by the "
        "gradient of the loss only; headwise.analysis.ablation_importance computes it."
    ),
    "over_batch": tr("Numbers, patterns and roles are over all entries of the batch, of which each map shows one."),
    "first_entries": tr("The first {shown} of {entries} entries of the batch are shown; entries=… chooses others."),
    "pooled_only": tr("The record keeps maps pooled to at most 64 × 64 cells; watch(maps='lazy') keeps them whole."),
    "repeated_calls": tr(
        "A layer that the model calls several times has a row for each call, with #2 for the second; statistics that "
        "were watched, and are not those of the maps, are over all of its calls."
    ),
    "no_patterns": tr("In cross attention there are no patterns: its queries and keys have no positions in common."),
    # Pictures and the table in a terminal.
    "panels_title": tr("Sentence {sentence}, head {head}: attention weights"),
    "panel": tr("{zero} of the cells are 0; rows sum to {low:.2f} to {high:.2f}"),
    "panel_padded": tr(
        "{zero} of the cells are 0; rows sum to {low:.2f} to {high:.2f}, with padding, which is not drawn"
    ),
    "pooled_weight": tr("largest weight of {cell} × {cell} tokens"),
    "not_shown": tr("Not shown here: {names}. Use a wider terminal or the HTML report."),
    # Notebooks.
    "title_map": tr("Attention map"),
    "head_number": tr("head {head}"),
    "no_picture": tr("No picture is drawn; pool(512) computes one for each head."),
    "small_pictures": tr(
        "{shown} of {heads} heads, entry 0 of the batch of {entries}: queries down, keys across; darker is larger, "
        "scaled to the largest weight of each head."
    ),
    "small_pooled": tr(
        "{shown} of {heads} heads, entry 0 of the batch of {entries}: queries down, keys across, mean over squares of "
        "{cell} × {cell}; darker is larger, scaled to the largest weight of each head."
    ),
    "no_picture_of_record": tr(
        "The maps are too large or too many for small pictures; hw.report(record, 'report.html') writes a page."
    ),
    "record_more": tr("hw.show(record, tokenizer, tokens=ids) shows every weight with its tokens."),
    # NaN and infinity, in reports and the viewer.
    "not_finite": tr(
        "Layer {layer}, head {head}: the scores of {count:,} queries are NaN or infinite and are not shown."
    ),
    "values_not_finite": tr(
        "Layer {layer}, head {head}: {count:,} numbers among its values are NaN or infinite; its weights are not "
        "affected."
    ),
    "windows_values_not_finite": tr(
        "Layer {layer}, head {head}: NaN or infinity is among its values; its weights are not affected."
    ),
    "more_not_finite": tr("NaN or infinity in the scores or values of {heads:,} heads in total."),
    # Errors of the viewer.
    "too_many_characters": tr(
        "the text has {n:,} characters; at most {characters:,} characters and {tokens:,} tokens are supported: {why}"
    ),
    "too_many_tokens": tr("the text has {n:,} tokens; at most {tokens:,} are supported: {why}"),
    "limit_of_option": tr("set by --max-tokens"),
    "limit_of_positions": tr("{name} has no positions beyond that"),
    "limit_of_memory": tr("more does not fit into the free memory of this machine"),
    "too_large": tr("the request is too large: a text may have {characters:,} characters at most"),
    "unreadable": tr("{sentence}", sense="unreadable"),
    "no_text": tr("there is no text of this name; the server may have been restarted"),
    "no_head": tr("there is no head {head} in layer {layer}"),
    "still_reading": tr("the text is still being computed; try again"),
    "failed": tr("the text could not be loaded: {error}"),
    "failure": tr("{sentence}"),
    "no_memory": tr("not enough memory for this text; use a shorter one"),
    "given_up": tr("this text is no longer being computed: it was cancelled or replaced by a newer one"),
    "busy": tr("too many tiles were requested at once; try again"),
    "misfit": tr("{sentence}", sense="misfit"),
    "broke": tr("internal error of the viewer; the terminal shows details"),
    "not_allowed": tr("{sentence}", sense="not allowed"),
}


def message(code: str, /, **values: int | float | str) -> Message:
    """One of MESSAGES with its values."""
    return MESSAGES[code].filled(code, **values)


def said(text: str) -> str:
    """A text of a picture, in the user's language."""
    return in_language(text, language())
