"""What kvferry's services say to each other: pure values, no input or output.

One module per idea; the wire messages are grouped by who receives them: `to_router`, `to_decoder`,
`to_prefiller`, `to_client`. docs/protocol.md lists every message with its fields.
"""
