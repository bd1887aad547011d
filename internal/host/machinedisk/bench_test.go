package machinedisk

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// BenchmarkCreate creates, attaches and removes a disk of the default size.
func BenchmarkCreate(b *testing.B) {
	for name, preallocate := range map[string]bool{"sparse": false, "preallocated": true} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				dir := b.TempDir()
				d := Disk{Image: filepath.Join(dir, "disk.img"), Dir: filepath.Join(dir, "rootfs"), Preallocate: preallocate}
				for _, err := range []error{d.Create(b.Context(), 20<<30), d.Attach(b.Context()), d.Detach(b.Context()), os.Remove(d.Image)} {
					if err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkWrite compares a disk with a folder of the host: sequential data, and the small synchronous writes of etcd.
func BenchmarkWrite(b *testing.B) {
	for _, kind := range []string{"folder", "sparse", "preallocated"} {
		for _, block := range []int{4 << 10, 64 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind, block>>10), func(b *testing.B) {
				dir := b.TempDir()
				d := Disk{Image: filepath.Join(dir, "disk.img"), Dir: filepath.Join(dir, "rootfs"), Preallocate: kind == "preallocated"}
				if err := os.Mkdir(d.Dir, 0o755); err != nil {
					b.Fatal(err)
				}
				if kind != "folder" {
					if err := d.Create(b.Context(), 4<<30); err != nil {
						b.Fatal(err)
					}
					if err := d.Attach(b.Context()); err != nil {
						b.Fatal(err)
					}
					defer func() { _ = d.Detach(b.Context()) }()
				}
				writeSynchronously(b, filepath.Join(d.Dir, "data"), make([]byte, block))
			})
		}
	}
}

func writeSynchronously(b *testing.B, path string, data []byte) {
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := f.WriteAt(data, 0); err != nil {
			b.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		b.Fatal(err)
	}
}
