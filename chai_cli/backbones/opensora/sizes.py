"""The sizes that Open-Sora 1.2 was trained on, by resolution and aspect ratio."""

from __future__ import annotations

from chai_cli.errors import ChaiError

# Width to height, as people say it (Open-Sora's own tables name them height to width).
NAMES = "8:3 21:9 25:12 2:1 17:9 50:27 16:9 8:5 3:2 4:3 1:1 3:4 2:3 9:16 9:17 1:2 27:50"
ASPECT_RATIOS = NAMES.split()
# Height x width in pixels, in the order of these ratios.
SIZES = {
    "144p": "117x312 125x291 133x277 135x270 139x262 141x260 144x256 151x241 156x234 "
    "166x221 192x192 221x165 235x156 256x144 263x139 271x135 277x132",
    "240p": "196x522 210x490 222x462 226x452 232x438 236x436 240x426 252x404 262x393 "
    "276x368 320x320 370x278 392x262 426x240 440x232 452x226 462x222",
    "360p": "294x784 314x732 332x692 340x680 350x662 352x652 360x640 380x608 392x588 "
    "416x554 480x480 554x416 588x392 640x360 660x350 678x340 692x332",
    "480p": "392x1046 420x980 444x925 452x904 466x880 470x870 480x854 506x810 522x784 "
    "554x738 640x640 740x555 784x522 854x480 880x466 906x454 924x444",
    "720p": "588x1568 628x1466 666x1388 678x1356 698x1318 706x1306 720x1280 758x1212 784x1176 "
    "832x1110 960x960 1108x832 1176x784 1280x720 1320x698 1358x680 1386x666",
}
RESOLUTION, ASPECT_RATIO = "240p", "16:9"  # where only one of them is named
DURATIONS = {"2s": 51, "4s": 102, "8s": 204, "16s": 408}  # frames


def size_of(resolution: str, aspect_ratio: str) -> tuple[int, int]:
    """Height and width of a preset, in pixels.

    Raises:
        ChaiError: there is none of that name.
    """
    if resolution not in SIZES:
        raise ChaiError(f"the resolution is one of {', '.join(SIZES)}, not {resolution!r}")
    if aspect_ratio not in ASPECT_RATIOS:
        raise ChaiError(f"the aspect ratio (width:height) is one of {', '.join(ASPECT_RATIOS)}, not {aspect_ratio!r}")
    height, width = SIZES[resolution].split()[ASPECT_RATIOS.index(aspect_ratio)].split("x")
    return int(height), int(width)


def frames_of(duration: str) -> int:
    """Frames of a preset.

    Raises:
        ChaiError: there is none of that name.
    """
    if duration not in DURATIONS:
        raise ChaiError(f"the duration is one of {', '.join(DURATIONS)}, not {duration!r}")
    return DURATIONS[duration]
