"""The words of the report, the viewer, pictures and tables, in English and Chinese; {name} marks a value.

Sentences that Python fills in are in `messages`; statistics, roles, designs and loaded models keep their own words.

>>> words("zh", "report")["head"], label("entropy", "zh")
('头', '熵')
"""

from headwise.stats import describe
from headwise.stats.base import unit_of
from headwise.table import HeadColumn
from headwise.wording import LANGUAGES, Bilingual, check_language, in_language, tr

PASSAGES = {
    "passages": tr("Strongest passages in the corpus"),
    "passages_about": tr(
        "Each passage is one query (outlined) and the text around it, tinted by what the query attends to. Strongest: "
        "where this head is strongest in the corpus, at most one passage of a text. Sampled: at random, from the same "
        "windows for all heads, which shows what the head usually does."
    ),
    "passages_by_weight": tr(
        "Strength: the largest weight of a query on a token of the text other than the first of the window and the "
        "query itself."
    ),
    "passages_by": tr("Strength: {name} of the query."),
    "passages_strongest": tr("Strongest"),
    "passages_sampled": tr("Sampled"),
    "list_comma": tr(", "),
    "passages_none": tr("This head was not measured, or no query has a strength."),
    "passage_place": tr("{file}, {where}, token {at}"),
    "passage_attends": tr("“{query}” → {keys}"),
    "passage_key": tr("“{token}” {weight}"),
}
CORPUS = {
    "corpus_lead": tr(
        "Every head over a corpus: the mean of each statistic over all queries, and the passages in which the head is "
        "strongest."
    ),
    "scatter": tr("Heads by two statistics"),
    "scatter_hint": tr(
        "Each point is a head. Select one to read its passages; with the keyboard, the arrow keys move between heads."
    ),
    "scatter_label": tr("Heads by {x} and {y}; colour: {colour}"),
    "across": tr("Across"),
    "up": tr("Up"),
    "colour": tr("Colour"),
    "contrast": tr("contrast of passages"),
    "contrast_about": tr(
        "Mean strength of the strongest passages minus that of the sampled ones: large for a head that attends "
        "strongly in few passages."
    ),
    "no_passages": tr("The sweep kept no passages; run it without --passages 0."),
}
# Places of texts in files, as `headwise.corpus` writes them.
PLACES = {
    "byte": tr("byte {at}"),
    "row": tr("row {at}"),
}


def by_name(by: str) -> Bilingual:
    """What a strength is called."""
    words = [describe(by, lang) for lang in ("en", "zh")]
    if words[0] is None or words[1] is None:
        return tr("weight")
    return Bilingual(words[0].label, words[1].label)


# Both pages, and the pictures.
SHARED = {
    "theme": tr("Switch between light and dark"),
    "head_name": tr("Layer {layer} · head {head}"),
    "head_short": tr("H{head}"),
    "layer_short": tr("L{layer}"),
    "short_name": tr("L{layer}H{head}"),
    "cells": tr("Cells show"),
    "mean": tr("mean"),
    "peak": tr("maximum"),
    "scale": tr("Colour scale"),
    "linear": tr("linear"),
    "sqrt": tr("square root"),
    "log": tr("logarithm"),
    "range": tr("Colour range"),
    "own": tr("this head"),
    "all": tr("all heads"),
    "all_heads": tr("All heads"),
    "key_axis": tr("key (attended token)"),
    "query_axis": tr("query (attending token)"),
    "query": tr("query"),
    "key": tr("key"),
    "weight": tr("weight"),
    "save": tr("Save PNG"),
    "bar_label": tr("Colour bar from 0 to {top}"),
    "controls": tr("Display options"),
    "order": tr("Order"),
    "text": tr("Text"),
    "looks_most": tr("“{what}” attends most to"),
    "looked_most": tr("“{what}” is attended most by"),
    "hits": tr("{n} matches"),
    "hit_of": tr("{i} of {n}"),
    "none": tr("none"),
}
# The report page.
REPORT = {
    "lead": tr(
        "The attention weights of every head on this text. They show which tokens a head attends to, not why the "
        "model produces its output; on another text the same head may attend to other tokens."
    ),
    "findings": tr("Findings"),
    "noscript": tr("This page requires JavaScript, which is disabled."),
    "passage": tr("Passage"),
    "layer": tr("Layer"),
    "head": tr("Head"),
    "layer_tip": tr("Numbered from 0, starting at the input."),
    "head_tip": tr("Numbered from 0 within the layer."),
    "sentence": tr("Sentence"),
    "whole": tr("Whole text"),
    "full": tr("Full size"),
    "full_hint": tr("Show the characters of all rows and columns and the number in each cell; scroll to see the rest"),
    "grid_hint": tr("One map per head: rows are layers, columns are heads. Select a map to enlarge it."),
    "pattern": tr("Strongest pattern"),
    "pattern_tip": tr(
        "In colour, a label: the score is above a published threshold, on 10 queries or more, and in 95 % of the "
        "samples of a block bootstrap. In grey, a tendency: a fifth of the weight, and twice that of equal weights."
    ),
    "map_hint": tr(
        "Each row shows the keys that one query attends to. Hover over a cell for its value, click to pin the row, "
        "drag to zoom. Keyboard: arrow keys, Enter, Escape."
    ),
    "mean_of": tr("mean weight in this cell"),
    "peak_of": tr("largest weight in this cell"),
    "masked": tr("masked: after the query"),
    "save_hint": tr("Save what is shown"),
    "save_png": tr("Save the map as a picture (PNG)"),
    "save_svg": tr("Save as a vector graphic (SVG)"),
    "save_csv": tr("Save the weights shown as a table (CSV)"),
    "find": tr("Search the text"),
    "next": tr("Next match"),
    "previous": tr("Previous match"),
    "text_as": tr("Show the text as"),
    "as_arcs": tr("Arcs"),
    "arcs_label": tr(
        "Arcs from queries, on the left, to keys, on the right; use the up and down arrow keys to select a token"
    ),
    "arcs_hint": tr(
        "Layer {layer}, a colour per head, strongest at {top}. A click switches a head, a double click shows it alone."
    ),
    "everywhere": tr("One token in all heads"),
    "everywhere_hint": tr("Pin a token to see in which head it attends most to which token."),
    "no_sink": tr("without the first token and the token itself"),
    "looks_where": tr("Where “{what}” attends most, by head"),
    "looked_where": tr("What attends most to “{what}”, by head"),
    "writes": tr("What this head writes"),
    "writes_about": tr(
        "The output of a head at a query is a sum over keys, projected into the residual stream. Direct effects only: "
        "later layers also read what a head writes."
    ),
    "writes_hint": tr("Pin a token, or point at a row of the map."),
    "writes_from": tr("Written at “{what}” from each key, ‖Δ‖"),
    "writes_logits": tr("Direct effect at “{what}” on logits, against their mean"),
    "next_token": tr("(next)"),
    "writes_channels": tr("q·k of “{what}” and “{key}”: its {n} strongest of {of} channels"),
    "channel": tr("channel {c}"),
    "tab_sides": tr("Side by side"),
    "sides_hint": tr(
        "Two heads, or one head on two texts. Texts with as many tokens are compared by position, others over the "
        "tokens that they have in common, in order. Both maps have the same colours."
    ),
    "sides_bar": tr("Colour bar of A and B"),
    "difference_bar": tr("Colour bar of the difference"),
    "differences": tr("Largest differences"),
    "difference_same": tr("Weights of A minus those of B: blue where A attends more, orange where B does."),
    "difference_of": tr(
        "A minus B over {n} common positions, of {a} and {b}: blue where A attends more, orange where B does."
    ),
    "no_difference": tr(
        "No difference: the two texts have no two tokens in common, or their cells cover different numbers of tokens."
    ),
    "looks": tr("attends to"),
    "looked": tr("attended by"),
    "chosen": tr("selected", sense="page"),
    "image_label": tr("The image; use the arrow keys to select a patch"),
    "image_hint": tr(
        "Select a token to see its weights on the patches of the image, or a patch to see which tokens attend to it."
    ),
    "image_patches": tr("image, {rows} × {columns} patches"),
    "image_sum_looks": tr("Weights of “{what}” on the patches, {sum} in all."),
    "image_sum_looked": tr("Weights of the patches on “{what}”, {sum} on average."),
    "image_towards": tr("Weights on the image"),
    "image_bar": tr("Colour bar of the image"),
    "save_image": tr("Save the image with its weights (PNG)"),
    "strip_label": tr("The text; use the left and right arrow keys to select a token"),
    "queries_text": tr("Text of the queries"),
    "keys_text": tr("Text of the keys"),
    "strip_hint": tr("Hover over a token to see what it attends to and which tokens attend to it; click to pin it."),
    "unpin": tr("Unpin"),
    "numbers": tr("Statistics of all heads"),
    "numbers_hint": tr("Measured on this text. Click a column header to sort, or a row to show that head."),
    "unit_tip": tr("Unit: {unit}."),
    "cell_hint": tr("Each cell covers {cell} × {cell} tokens."),
    "card": tr("Statistics of layer {layer} · head {head}"),
    "card_hint": tr("Blue: this head. Grey: all heads."),
    "label_hint": tr(
        "{label}: a label, on {rows} queries and in {confidence} % of the samples. Equal weights would give {uniform}."
    ),
    "tendency_hint": tr(
        "{label}: on {rows} queries; not enough for a label ({confidence} % of the samples). Equal weights would give "
        "{uniform}."
    ),
    "no_label": tr("No label and no tendency on this text."),
    "tabs": tr("Views"),
    "tab_maps": tr("Maps"),
    "tab_compare": tr("Compare heads"),
    "alike": tr("Similarity of heads"),
    "alike_hint": tr(
        "Each cell is a pair of heads. Hover over it for its value, click it to show the head of its row. Heads that "
        "are similar on this text may differ on another."
    ),
    "alike_label": tr("Pairs of heads: {name}"),
    "compared": tr("Compare by"),
    "order_alike": tr("by similarity"),
    "order_layers": tr("by layer"),
    "pairs": tr("Most similar pairs"),
    "importance": tr("Importance of heads"),
    "importance_hint": tr(
        "How much the loss on this text changes without a head, or how sensitive it is to the head. Rows are layers, "
        "columns are heads; orange means that the loss decreases."
    ),
    "measured_by": tr("Method"),
    "matters_most": tr("Most important"),
    "matters_least": tr("Least important"),
    "notes": tr("Notes"),
    "footer": tr("Written by headwise. This file is self-contained and loads nothing from the network."),
    "failure": tr("This browser cannot show the weights ({error}). Use a browser from 2023 or later."),
}
# Maps, records and layers in notebooks.
NOTEBOOK = {
    "small_hint": tr(
        "One picture per head: queries from top to bottom, keys from left to right; darker is larger, scaled to the "
        "largest weight of each head."
    ),
    "more_heads": tr("… and {count} more heads"),
    "statistics_hint": tr("One picture per statistic: rows are layers, columns are heads; darker is larger."),
    "step": tr("step"),
    "formula": tr("formula"),
    "shape": tr("shape"),
    "meaning": tr("meaning"),
    "parameter": tr("parameter"),
    "count": tr("numbers"),
    "total": tr("total"),
}
# The viewer.
VIEWER = {
    "title": tr("Attention on long texts"),
    "lead": tr(
        "Load a text to see what every head attends to, from the whole map down to single weights. Weights show which "
        "tokens a head attends to, not why the model produces its output."
    ),
    "language_tip": tr("Show this page in Chinese"),
    "text_hint": tr("Type or paste a text, or open a file."),
    "open_file": tr("Open a file"),
    "read": tr("Read"),
    "cancel": tr("Cancel"),
    "another": tr("Load another text"),
    "back_to_text": tr("Keep this text"),
    "count": tr("{n} characters"),
    "count_one": tr("1 character"),
    "count_limit": tr("{n} of {limit} characters"),
    "too_long": tr("The text has {n} characters; this model supports at most {limit}."),
    "empty_text": tr("Enter a text first."),
    "bad_file": tr("{name} is not a UTF-8 text file."),
    "tokens": tr("{n} tokens"),
    "one_token": tr("1 token"),
    "trained": tr("trained on up to {n} tokens"),
    "model_facts": tr("{name} · {layers} layers · {heads} heads"),
    "state_waiting": tr("Waiting for the model"),
    "state_reading": tr("Computing layer {layer} of {layers} · {drawn} of {heads} heads drawn"),
    "state_drawing": tr("Drawing layer {layer} of {layers} · {drawn} of {heads} heads drawn"),
    "seconds_left": tr("about {n} s left"),
    "minutes_left": tr("about {n} min left"),
    "cancelled": tr("Cancelled."),
    "taken": tr("This text is no longer being computed: it was cancelled or replaced by a newer one."),
    "failed": tr("The text could not be loaded: {error}"),
    "heads_hint": tr(
        "One map per head: queries from top to bottom, keys from left to right. Select a map to enlarge it."
    ),
    "by_layer": tr("by layer"),
    "largest": tr("largest first"),
    "smallest": tr("smallest first"),
    "statistic": tr("Statistic"),
    "statistic_bar": tr("Bar below a map: {name}, {low} to {high} {unit}"),
    "pair_in_heads": tr("This pair of tokens, in all heads"),
    "cell_in_heads": tr("These tokens, in all heads"),
    "previous_head": tr("Previous head"),
    "next_head": tr("Next head"),
    "auto": tr("current view"),
    "from": tr("from"),
    "to": tr("to"),
    "fit": tr("Whole map"),
    "zoom_in": tr("Zoom in"),
    "zoom_out": tr("Zoom out"),
    "link": tr("Copy link"),
    "link_tip": tr("Link to this view; valid while the server is running"),
    "linked": tr("Link copied."),
    "link_by_hand": tr("Copy the address of this page instead."),
    "keys_tip": tr("Mouse and keyboard"),
    "keys_help": tr(
        "Drag to pan; use the wheel or + and − to zoom; double-click to zoom in; click to pin a cell. Arrow keys pan, "
        "Enter places a cursor, Esc removes it, 0 shows the whole map, [ and ] switch heads, m switches the pooling, "
        "/ searches, n and N go to the next and previous match."
    ),
    "map_label": tr("Map of layer {layer}, head {head}"),
    "mean_of": tr("mean of {c}×{c} weights"),
    "max_of": tr("largest of {c}×{c} weights"),
    "cell_mean": tr("Each cell is the mean of {c}×{c} weights."),
    "cell_max": tr("Each cell is the maximum of {c}×{c} weights."),
    "level_exact": tr("every weight"),
    "level_mean": tr("mean of {c}×{c}"),
    "level_max": tr("maximum of {c}×{c}"),
    "nothing_allowed": tr("masked"),
    "not_there_yet": tr("loading …"),
    "point_hint": tr("Hover over a cell, or tap it, for its value."),
    "search": tr("Search"),
    "search_label": tr("Search the text"),
    "search_hint": tr("Search the text"),
    "hits_more": tr("first {n} matches"),
    "no_hits": tr("No matches for “{q}”."),
    "next": tr("Next"),
    "previous": tr("Previous"),
    "lost": tr("Connection to headwise lost; retrying …"),
    "busy": tr("headwise is busy; retrying …"),
    "wrong_token": tr("The token in the address of this page is wrong. Open the address that headwise view printed."),
    "gone": tr("The server no longer has this text; load it again."),
    "still_busy": tr("headwise is still busy; try again later."),
    "refused": tr("headwise returned status {status}."),
    "footer": tr("Served by headwise on this machine only; no data leaves it."),
}
# Columns that are no statistics of the registry.
COLUMNS = {
    "loss without it": tr("loss without it"),
    "gradient": tr("gradient"),
    "padding_mass": tr("padding mass"),
}
CORPUS_PAGE = {name: REPORT[name] for name in ("noscript", "layer", "head", "footer", "failure")}
PAGES = {
    "report": REPORT | PASSAGES, "viewer": VIEWER, "notebook": NOTEBOOK, "corpus": CORPUS_PAGE | PASSAGES | CORPUS,
}  # fmt: skip


def words(lang: str, page: str) -> dict[str, str]:
    """The words of the page "report", "viewer" or "corpus", or of the "notebook", and of all, in "en" or "zh"."""
    check_language(lang)
    shown = {key: in_language(text, lang) for key, text in {**SHARED, **PAGES[page]}.items()}
    if page == "viewer":  # its button leads to the other one
        shown["language"] = next(name for language, name in LANGUAGES.items() if language != lang)
    return shown


def label(name: str, lang: str, *, short: bool = False) -> str:
    """What the column of that name is called."""
    found = describe(name, lang)
    if found is not None:
        return found.short if short else found.label
    return in_language(COLUMNS[name], lang) if name in COLUMNS else name.replace("_", " ")


def unit(text: str, lang: str) -> str:
    """A unit, in that language."""
    return in_language(unit_of(text), lang)


def description(name: str, column: HeadColumn, lang: str) -> str:
    """What a column is; that of a known statistic in its own words."""
    english, found = describe(name, "en"), describe(name, lang)
    if english is not None and found is not None and column.description == english.summary:
        return found.summary
    return in_language(column.description, lang)
