package atomicfile

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Overwrite gives a small file another content in its place, for a full disk that has no room for a second file, and for a file that is
// mounted. Without room for a longer content, the file stays as it is. After a crash, the content can be a mixture. It is not synced.
func Overwrite(path string, data []byte, mode fs.FileMode) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	if err = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, int64(max(1, len(data)))); errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	if err == nil {
		_, err = file.WriteAt(data, 0)
	}
	if err == nil {
		err = file.Truncate(int64(len(data)))
	}
	return errors.Join(err, file.Close())
}
