// The view as a PNG: title, map with its axes, and the colour bar.

const SHARP = 2;        // pixels of the picture for a css pixel, at least

function pictureOf(plot, { title, says, foot }) {
  const ratio = Math.max(SHARP, devicePixelRatio || 1), { box, shows } = plot, width = box.clientWidth, height = box.clientHeight;
  const head = 58, below = 66, map = make("canvas", { width: width * ratio, height: height * ratio }), pen = map.getContext("2d");
  pen.scale(ratio, ratio);
  plot.paint(pen, ratio);
  plot.axes.draw(pen);
  plot.cross(pen);
  const out = make("canvas", { width: width * ratio, height: (height + head + below) * ratio }), context = out.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = css("--panel");
  context.fillRect(0, 0, width, height + head + below);
  context.textBaseline = "alphabetic";
  context.fillStyle = css("--ink");
  context.font = `600 16px ${css("--ui")}`;
  context.fillText(title, 14, 26, width - 28);
  context.fillStyle = css("--muted");
  context.font = `12.5px ${css("--ui")}`;
  context.fillText(says, 14, 46, width - 28);
  context.drawImage(map, 0, head, width, height);
  paintBar(context, { left: plot.camera.plot.left, right: width - 34, y: head + height + 4 }, shows.top, shows.scale, true, shows.low);
  context.textAlign = "left";
  context.fillStyle = css("--muted");
  context.font = `11px ${css("--ui")}`;
  context.fillText(foot, 14, head + height + below - 12, width - 28);
  return out;
}
