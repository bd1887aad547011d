package controlplane

// stores provides what machines need to reach a backup store: its credentials, and the fingerprints of the keys that a
// backup depends on.
type stores struct{ *secrets }
