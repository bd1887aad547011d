// Package diagnosis derives from the conditions of objects why they wait, since when, and what a user can do, and the updates in
// place. All commands and the web page show its results. OneLine and Typed prepare texts and objects for them.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package diagnosis
