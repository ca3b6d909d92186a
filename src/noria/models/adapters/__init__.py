"""LoRAs, ControlNets, IP-Adapters, embeddings, refiners, upscalers and classifiers that operators add to models."""
