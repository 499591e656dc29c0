"""A decoder for run-length encoded BMP that writes whole runs, with the same result as Pillow's.

Pillow's own decoder appends single pixels in Python, so a small file may take seconds.
Reference: Bitmap Compression, Windows GDI (RLE8, RLE4).
"""

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile

END_OF_LINE, END_OF_BITMAP, DELTA = 0, 1, 2
_PILLOWS, _OURS = "bmp_rle", "caravan_bmp_rle"
_LONGEST_RUN = 255


class BmpFile(BmpImageFile):
    """Pillow's BMP file with this decoder; opening it reads the header only."""

    def _open(self) -> None:
        super()._open()
        self.tile = [
            tile._replace(codec_name=_OURS) if tile.codec_name == _PILLOWS else tile
            for tile in self.tile
        ]

    @property
    def has_run_lengths(self) -> bool:
        return any(tile.codec_name == _OURS for tile in self.tile)


class _Decoder(ImageFile.PyDecoder):
    _pulls_fd = True

    def decode(self, buffer: object) -> tuple[int, int]:
        assert self.fd is not None
        begin = self.fd.tell()
        size = self.state.xsize, self.state.ysize
        pixels = expand(self.fd.read(), *size, nibbles=self.args[1], begin=begin)
        self.set_as_raw(pixels, "L" if self.mode in ("1", "L") else "P", (0, self.args[-1]))
        return -1, 0


Image.register_decoder(_OURS, _Decoder)


def expand(data: bytes, width: int, height: int, *, nibbles: bool, begin: int = 0) -> bytes:
    """width * height colour indices, row by row from the bottom; fewer if the data end early.

    `nibbles`: RLE4. `begin`: the offset of the data in the file; literal runs end at even offsets.
    """
    total = width * height
    pixels = bytearray(total)
    colours = [_longest_run(value, nibbles) for value in range(256)]
    at = done = column = 0
    while done < total and at + 2 <= len(data):
        count, value = data[at], data[at + 1]
        at += 2
        if count:
            count = min(count, width - column)
            if count > 0:  # pixels beyond the end of the row are dropped
                pixels[done : done + count] = colours[value][:count]
                done += count
                column += count
        elif value == END_OF_LINE:
            done += -done % width
            column = 0
        elif value == END_OF_BITMAP:
            break
        elif value == DELTA:
            if at + 2 > len(data):
                break
            done += min(total - done, data[at] + data[at + 1] * width)
            column = done % width
            at += 2
        else:
            count = min(total - done, value)
            literal = data[at : at + ((count + 1) // 2 if nibbles else count)]
            found = _split(literal)[:count] if nibbles else literal
            pixels[done : done + len(found)] = found
            done += len(found)
            if len(found) < count:
                break
            column += value
            at += len(literal)
            at += (begin + at) % 2
    return bytes(pixels[:done])


def _longest_run(value: int, nibbles: bool) -> bytes:
    if not nibbles:
        return bytes((value,)) * _LONGEST_RUN
    return bytes((value >> 4, value & 15)) * (_LONGEST_RUN // 2 + 1)


def _split(data: bytes) -> bytes:
    """The two indices of each byte."""
    return bytes(index for byte in data for index in (byte >> 4, byte & 15))
