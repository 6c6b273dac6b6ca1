"""What every room may use: files, written whole or not at all; validated reading; and what long calls share."""

from headwise.base.files import atomic_folder, atomic_path, write_text

__all__ = ["atomic_folder", "atomic_path", "write_text"]
