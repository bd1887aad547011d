package controlplane

// stores provides the access of machines to a backup store: its credentials, and the fingerprints of the keys that a
// backup depends on.
type stores struct{ *secrets }
