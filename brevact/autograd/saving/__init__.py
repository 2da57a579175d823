"""How a tensor is saved: its saved form, the record of its storage, stand-ins, and the saved-tensor hooks."""
