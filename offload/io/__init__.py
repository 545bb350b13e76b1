"""Tensors to files and back: handles, tickets, files, page-locked memory."""

from offload.io import pinned
from offload.io.file import File
from offload.io.handle import AsyncIOHandle
from offload.io.tickets import Ticket

__all__ = ["AsyncIOHandle", "File", "Ticket", "pinned"]
