"""The guide: one topic a page, with code that runs, pictures, what the claims say, and exercises.

pages      topics read from their pages    registry   all of them
topic      a topic                         outputs    what the code of a topic prints
exercises/ our own solutions               tour       a topic in the terminal
sections   what shows each place of a text book       the table of all places
finding    from a reader's words to places narrow     code in lines of a given width
grading/   runs a reader's function and compares it with ours
"""
