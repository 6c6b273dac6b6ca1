"""What notebooks show of maps, reports, records and layers: pictures that need no script, under a page that zooms.

Everything is in the HTML itself: no network, no path, no script outside of a sandboxed frame. A notebook that removes
frames or forbids scripts, such as an untrusted one or GitHub's preview, leaves the pictures.
"""

from headwise.reports.notebook import layers as layers, maps as maps, records as records, whole as whole
