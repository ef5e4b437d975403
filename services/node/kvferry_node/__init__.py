"""What every kvferry service does: settings, logs, channels, membership, placement, metrics, operational HTTP.

A service is written as: a settings struct and its command (`settings`, `options`), one bound socket and the channels to
its peers (`channels`), its entry in Redis (`registry`), the HTTP endpoints that operators read (`ops`), all inside
`service.run`. Routers also look at the cluster (`membership`) and choose nodes (`placement`).
"""
