"""The guide: one topic a page, with code that runs, pictures, what the claims say, and exercises.

topic      a topic and its exercises       registry   all of them
topics/    a module for each topic         outputs    what the code of a topic prints
page       a topic as a page of docs/guide tour       a topic in the terminal
sections   what shows each place of a text book       the table of all places
finding    from a reader's words to places narrow     code in lines of a given width
grading/   runs a reader's function and compares it with ours
"""
