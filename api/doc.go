// Package api is the parent of the API groups; each group has a package of types below it. Packages of types import
// Kubernetes, Cluster API and other packages of types, and never code from internal. The tests of this package hold all
// types to the project's conventions.
//
// Layer: api. Allowed imports: none.
package api
