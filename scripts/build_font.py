"""Make the font that pictures and pages carry, from Noto Sans CJK (SIL OFL 1.1; Debian's fonts-noto-cjk).

    python scripts/build_font.py /usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc [TEXT ...]

The font holds Latin, Greek, signs, kana, and the Han characters of GB 2312 and Big5: what Chinese text is written
with, simplified and traditional, at a fifth of the size. Files of text given after the font add their characters.
The signs for line break, return and tab, which Noto Sans CJK has not, are drawn here.
"""

import sys
from pathlib import Path
from typing import Any

from fontTools import subset
from fontTools.pens.t2CharStringPen import T2CharStringPen
from fontTools.ttLib import TTCollection, TTFont

OUT = Path(__file__).parent.parent / "src/headwise/reports/fonts/HeadwiseHan.otf"
NAME = "Headwise Han"
WIDTH = 1000  # of a Han character, whose em it is
# Sign to draw: (an arrow whose glyph is given up for it, its polygons in units of 1000 an em, counter-clockwise).
DRAWN = {
    0x21B5: (
        0x21E6,
        [
            [(330, 240), (330, 180), (870, 180), (870, 640), (800, 640), (800, 240)],
            [(130, 210), (350, 70), (350, 350)],
        ],
    ),
    0x21E5: (
        0x21E8,
        [
            [(120, 350), (640, 350), (640, 410), (120, 410)],
            [(800, 380), (590, 520), (590, 240)],
            [(820, 180), (880, 180), (880, 580), (820, 580)],
        ],
    ),
    0x240D: (
        0x21E7,
        [
            [(880, 410), (360, 410), (360, 350), (880, 350)],
            [(200, 380), (410, 240), (410, 520)],
            [(180, 580), (120, 580), (120, 180), (180, 180)],
        ],
    ),
}


def characters() -> set[int]:
    """Code points to keep."""
    keep = set(range(0x20, 0x7F)) | set(range(0xA0, 0x250)) | set(range(0x370, 0x400)) | set(range(0x400, 0x460))
    keep |= set(range(0x2010, 0x2070)) | set(range(0x2190, 0x2200)) | set(range(0x2200, 0x2270))
    keep |= {0x2400, 0x2409, 0x240A, 0x2420, 0x2423, 0xFFFD}
    keep |= set(range(0x2500, 0x2600)) | set(range(0x3000, 0x3100)) | set(range(0xFF00, 0xFFF0))
    for codec, lead in (("gb2312", range(0xA1, 0xF8)), ("big5", range(0xA1, 0xFA))):
        for high in lead:
            for low in range(0x40, 0xFF):
                keep.update(map(ord, bytes((high, low)).decode(codec, errors="ignore")))
    return keep


def draw_signs(font: TTFont) -> None:
    """Draw the signs of `DRAWN` over the glyphs that they take."""
    strings = font["CFF "].cff[0].CharStrings
    for sign, (taken, polygons) in DRAWN.items():
        glyph = font.getBestCmap()[taken]
        old = strings[glyph]
        pen = T2CharStringPen(font["hmtx"][glyph][0], strings)
        for polygon in polygons:
            pen.moveTo(polygon[0])
            for point in polygon[1:]:
                pen.lineTo(point)
            pen.closePath()
        strings[glyph] = pen.getCharString(private=old.private, globalSubrs=old.globalSubrs)
        for table in font["cmap"].tables:
            if table.isUnicode() and table.format != 14:
                table.cmap.pop(taken, None)
                table.cmap[sign] = glyph


def make_plain(font: TTFont) -> None:
    """Draw each glyph without subroutines and hints, with one width that is not written: pages copy them one by one."""
    top, glyphs = font["CFF "].cff[0], font.getGlyphSet()
    drawn: dict[str, Any] = {}
    for name in font.getGlyphOrder():
        width = font["hmtx"][name][0]
        pen = T2CharStringPen(None if width == WIDTH else width, glyphs)
        glyphs[name].draw(pen)
        drawn[name] = pen.getCharString(globalSubrs=top.GlobalSubrs)
    font["CFF "].cff.desubroutinize()  # those that nobody calls any more go too
    for entry in top.FDArray:
        entry.Private.defaultWidthX, entry.Private.nominalWidthX = WIDTH, 0
    for name, outline in drawn.items():
        old = top.CharStrings[name]
        old.program, old.bytecode = outline.program, None


def main() -> None:
    """Write the subset."""
    collection = TTCollection(sys.argv[1])
    font = next(f for f in collection.fonts if f["name"].getDebugName(1) == "Noto Sans CJK SC")
    options = subset.Options()
    options.layout_features = []
    options.hinting = False
    options.desubroutinize = False
    options.name_IDs = ["*"]
    options.drop_tables += ["vhea", "vmtx", "VORG", "BASE", "GSUB", "GPOS"]
    worker = subset.Subsetter(options)
    texts = "".join(Path(name).read_text(encoding="utf-8") for name in sys.argv[2:])
    worker.populate(unicodes=characters() | set(DRAWN) | set(map(ord, texts)))
    draw_signs(font)
    worker.subset(font)
    make_plain(font)
    for record in list(font["name"].names):
        text = {1: NAME, 3: f"{NAME} 1.0", 4: f"{NAME} Regular", 6: NAME.replace(" ", "") + "-Regular", 16: NAME}
        if record.nameID in text:
            record.string = text[record.nameID]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    font.save(OUT)
    sys.stdout.write(f"{OUT}: {OUT.stat().st_size:,} bytes, {len(font.getBestCmap()):,} characters\n")


if __name__ == "__main__":
    main()
