// Package manager is the process of the four providers: its command, its flags, and the controller manager with caches
// and clients that the providers share.
//
// Layer: manager. Allowed imports: api, library, contract, reconciler.
package manager
