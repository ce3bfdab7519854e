"""LangChain models over a FlashEngine in this process. Needs ``langchain-core`` (extra ``langchain``)."""

from __future__ import annotations

from .chat import ChatDeepSeekFlash
from .llm import DeepSeekFlashLLM

__all__ = ["ChatDeepSeekFlash", "DeepSeekFlashLLM"]
