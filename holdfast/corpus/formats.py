"""File names: formats that are read, and data that must not be trained on as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, cast

Format = Literal["text", "jsonl", "parquet", "other"]  # other: data without a supported format
Compression = Literal["", "gz", "zst"]

NOT_TEXT = "not_text"  # the reason that counts such files
LFS_ADVICE = "is a pointer of Git LFS and not the file; run `git lfs pull`"

# Extensions of data that is no text, by the remedy.
NOT_READ = {
    "table": (
        "arrow arrows avro csv dbf dta feather h5 hdf hdf5 ipc mat mdb msgpack npy npz ods orc parq pq psv "
        "rdata rds sas7bdat sav sqlite sqlite3 tfrecord tfrecords tsv xls xlsb xlsm xlsx db lmdb mdx idx bin "
        "pkl pickle joblib"
    ),
    "archive": (
        "7z apk bz2 br cab cpio deb dmg gzip iso jar lz lz4 lzma lzo rar rpm snappy tar tbz tbz2 tgz txz tzst "
        "war whl xz zip zlib zstd"
    ),
    "document": ("azw3 chm djvu doc docm docx epub mobi odp odt pdf ppt pptm pptx rtf xps"),
    "media": (
        "aac avi avif bmp eot flac flv gif heic heif ico icns jfif jp2 jpeg jpg jxl m4a m4v mid midi mkv mov "
        "mp3 mp4 mpeg mpg oga ogg ogv opus otf png psd tif tiff ttf wav webm webp wma wmv woff woff2"
    ),
    "program": (
        "a class ckpt dll dylib exe gguf ggml msi o obj onnx pb pdb pt pth pyc pyd pyo safetensors so tflite wasm"
    ),
}
_KINDS = {name: kind for kind, names in NOT_READ.items() for name in names.split()}


def suffixes(name: str, wanted: Literal["auto", "text", "jsonl", "parquet"]) -> tuple[Format, Compression]:
    """The format and the compression of a file, from its name."""
    path = PurePath(name.lower())
    compression: Compression = ""
    if path.suffix in (".gz", ".zst"):
        compression = cast(Compression, path.suffix[1:])
        path = path.with_suffix("")
    if wanted != "auto":
        return wanted, compression
    if path.suffix in (".jsonl", ".ndjson", ".jsonlines"):
        return "jsonl", compression
    if path.suffix == ".parquet":
        return "parquet", compression
    return ("other" if path.suffix == ".json" or _kind(path.suffix) else "text"), compression


def advice(name: str) -> str:
    """The advice for a file of the format `other`."""
    path = PurePath(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix
    if suffix == ".json":
        remedy = "set the source's `format` to jsonl if each line is a record, or to text if each file is a document"
    elif suffix in (".parq", ".pq"):
        remedy = "set the source's `format` to parquet"
    else:
        remedy = {
            "table": "convert it to .jsonl or .parquet, or set the source's `format` to text to train on it as it is",
            "archive": "unpack it; single files may be compressed as .gz or .zst",
        }.get(_kind(suffix) or "", "extract its text, or leave it out of the pattern")
    return f"{suffix} files are not read as text; {remedy}"


def _kind(suffix: str) -> str | None:
    return _KINDS.get(suffix.removeprefix("."))
