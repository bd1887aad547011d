// Package hostpb is the protocol between the infrastructure provider and capstand, generated from
// host.proto (Debian packages protobuf-compiler and libprotobuf-dev; protoc-gen-go and
// protoc-gen-go-grpc on the PATH).
//
// Layer: contract. Allowed imports: api, library.
package hostpb

//go:generate protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative host.proto
