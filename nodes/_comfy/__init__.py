"""The only place that imports ComfyUI: its model objects, memory management, folders and server."""
