"""Scripts of the tests of pages."""

SETTLED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))"
# Files are kept instead of offered.
KEPT = """
window.files = [];
URL.createObjectURL = (blob) => { files.push(blob); return "data:,"; };
window.fileText = async () => new TextDecoder("utf-8", { ignoreBOM: true }).decode(await files.at(-1).arrayBuffer());
"""
