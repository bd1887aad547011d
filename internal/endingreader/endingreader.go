// Package endingreader ends the copy of a large or slow file with its context.
//
// Layer: library. Allowed imports: api.
package endingreader

import (
	"context"
	"io"
)

// New returns a reader of the same bytes that fails with the error of ctx after its end. A Read that has begun is not interrupted.
func New(ctx context.Context, from io.Reader) io.Reader { return reader{ctx, from} }

type reader struct {
	ctx  context.Context
	from io.Reader
}

// Read implements io.Reader.
func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.from.Read(p)
}
